"""What a round drafts: rules, what rounds cost, and what drafts are worth."""
