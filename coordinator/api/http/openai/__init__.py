"""The endpoints in the shape of the OpenAI API, and those that vLLM adds."""
