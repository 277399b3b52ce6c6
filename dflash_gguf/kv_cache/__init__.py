"""The prefix cache: K/V of earlier requests, kept in memory and in files for later ones."""
