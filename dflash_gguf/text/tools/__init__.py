"""Tool calls in answers: a parser for each family of chat templates."""
