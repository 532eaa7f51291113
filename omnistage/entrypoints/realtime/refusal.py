"""What a client asked that cannot be done; the session goes on."""

from __future__ import annotations


class Refusal(Exception):
    """Becomes an `error` event. `code` is one of OpenAI's where they have one."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.param = code, message, param
