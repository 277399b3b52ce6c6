"""What may follow: proposers, what they learn about their chances, and trees of candidates."""
