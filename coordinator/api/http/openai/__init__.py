"""The endpoints of the OpenAI API, and vLLM's additional ones."""
