"""How much a round drafts and verifies. Arithmetic only: no clock, no file, no model.

    rule.py     the two choices of a round: what is asked for, and what is verified of it
    known.py    what these choices rest on and what they may lose: the rate, the accounts
    costs.py    what a round was (`Round`), and what one of any size is expected to take
    times.py    what is learned from measured times: medians, lines, experts

Read in this order. `Fixed` in rule.py shows what a rule is; `Auto` below it is the one that users
get. Its comments name quantities of known.py and costs.py by what they mean, so that neither need
be read first.
"""
