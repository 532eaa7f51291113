"""Load on a server of the OpenAI routes, and what its clients see."""
