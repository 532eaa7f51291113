"""The embedded pipeline: Whisper tiny.en listens, SmolLM2 thinks, the hibari and Piper voices speak."""
