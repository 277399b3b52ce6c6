"""The prefix cache: sequences that earlier requests left behind, in memory and in files."""
