"""Speculative decoding: proposes candidate tokens, selects those that pay, learns from the outcome.

    speculator.py         proposes, selects and observes a round of several requests
    controller.py         decides the draft of a round and the nodes to verify
    cost_model.py         measured seconds of rounds, and lines to other sizes
    calibration.py        probabilities of acceptance from a proposer's scores
    tree.py, ddtree.py    candidate trees, and the best-first search that builds them (DDTree)
    runtime.py            the proposers and controllers of an engine, and the file of its costs
    proposers/            sources of candidates, one a file

All but runtime.py and proposers/ are arithmetic: no clock, no file, no model. `auto` is on one page
in docs/develop/design.md. Words, and what they are counted in:

    plain           of a round in which every sequence runs one row and gets one token
    free            of proposers: candidates need no forward pass
    ranked, top-1   of drafts: several candidates a position, or the best alone, which is quicker
    rate            tokens a second of the best way to decode: how many a second of time must bring
    break-even      tokens that a pass must bring for its candidates: rate * the seconds they add
    value           tokens that a pass is expected to bring beyond its break-even
    gain, loss      what a draft brings beyond plain decoding, or takes: tokens, or plain rounds
    probe           a draft that is expected to lose, run to measure its acceptance
"""
