"""HunyuanImage-3.0: one checkpoint that writes text about text and pictures, and draws and edits pictures."""
