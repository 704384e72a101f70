"""Where the workers are: static lists, and what finds workers that come and go."""
