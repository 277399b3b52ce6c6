"""Speculative decoding: proposes candidate tokens, selects nodes to verify, learns from outcomes.

    speculator.py         runs the proposers and the controller for a round of several requests
    controller.py         decides each round's draft and the nodes to verify
    cost_model.py         seconds of passes and drafts, measured and interpolated
    calibration.py        acceptance probabilities, learned from a proposer's scores and outcomes
    tree.py, ddtree.py    candidate trees, and the best-first search that builds them (DDTree)
    runtime.py            proposers, controllers and cost file of an engine
    proposers/            sources of candidates, one in each file

All but runtime.py and proposers/ are pure arithmetic: no clock, no file, no model. Gains are
counted in tokens, losses in plain rounds: rounds that decode one token a sequence without a draft.
"""
