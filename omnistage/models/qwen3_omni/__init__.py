"""Qwen3-Omni: thinker (text, audio, image, video in; text out), talker (speech codes), code2wav (waveform)."""
