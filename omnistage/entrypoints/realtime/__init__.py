"""The realtime WebSocket: sessions that hear, answer and are interrupted, with OpenAI's GA event names."""
