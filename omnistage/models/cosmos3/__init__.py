"""Cosmos3: images, videos, sound and robot actions from one packed denoiser with a text tower."""
