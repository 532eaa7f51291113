"""MiniMax-H3: video with sound from text, keyframes or references."""
