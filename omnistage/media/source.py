"""Where media come from: bytes inside the request, or, where the configuration allows it, URLs and files."""

from __future__ import annotations

from omnistage.config.model import MediaConfig
from omnistage.media.data_url import decode_data_url
from omnistage.media.fetch import Fetcher
from omnistage.media.files import read_file_url


class MediaSource:
    """Reads the URLs of requests. Blocking: call it from a thread."""

    def __init__(self, config: MediaConfig) -> None:
        self._config = config
        self._fetcher = Fetcher(config)

    def read(self, url: str, max_bytes: int, param: str) -> bytes:
        """The bytes of a data:, http(s): or file: URL. Raises RequestError naming `param`."""
        if url.startswith("data:"):
            return decode_data_url(url, max_bytes, param)
        if url.startswith("file:"):
            return read_file_url(url, self._config.file_root, max_bytes, param)
        limit = min(max_bytes, self._config.fetch_max_mb << 20)
        return self._fetcher.fetch(url, limit, param)
