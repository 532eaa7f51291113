from tests.entrypoints.http.conftest import Running, Start, server, start

__all__ = ["Running", "Start", "server", "start"]
