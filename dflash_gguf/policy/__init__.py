"""How much a round drafts and verifies. Arithmetic only: no clock, no file, no model.

    rule.py     the two choices of a round: what is asked for, and what is verified of it
    known.py    what they rest on: the rate, what promises were worth, what may still be lost

Read in this order. `Fixed` in rule.py shows what a rule is; `Auto` below it is the one that users
get. What rounds cost is told by ../costs, which need not be read for it.
"""
