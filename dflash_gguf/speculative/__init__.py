"""Speculative decoding: proposes candidate tokens, selects those that pay, learns from the outcome.

    speculator.py         one request's speculation in a round: propose, select, observe
    controller.py         decides what the draft model is asked for, and which nodes are verified
    controller_state.py   the learned state of the automatic controller
    prices.py             the tokens a pass must bring for its candidates to break even
    cost_model.py         the measured duration of rounds, and the expected one of other sizes
    statistics.py         running medians and interpolation of measured times
    promise.py            expected accepted tokens by draft length
    calibration.py        probabilities of acceptance from a proposer's scores
    tree.py, ddtree.py    candidate trees, and the best-first search that builds them (DDTree)
    runtime.py            the proposers and controllers of an engine, and the file of its costs
    proposers/            sources of candidates, one a file

All but runtime.py and proposers/ are arithmetic: no clock, no file, no model.

Words, and what they are counted in:

    plain           of a round in which every sequence runs one row and gets one token
    paid, free      of proposers: whether candidates need a forward pass (`needs_forward`) or none
    ranked, top-1   of drafts: several candidates a position, or the best alone, which is quicker
    way             positions and shape of a draft that needs a pass
    mixed           of rounds in which both kinds propose (`has_both_kinds`)
    rate            tokens a second of the best way to decode: how many a second of time must bring
    break-even      tokens that a pass must bring for its candidates: rate * the seconds they add
    value           tokens that a pass is expected to bring beyond its break-even
    gain, loss      what a way brings beyond plain decoding, or takes: tokens, or plain rounds
    look            a draft that is not expected to gain, made to see what comes of it
    quiet           of plain rounds in which nobody is asked, or nothing is proposed: the
                    controller observes them later, all at once

When something is asked again:

    the best way    after `Known.ttl_rounds` rounds, so that deciding is a small part of the time;
                    where it may not be run, when the account allows it
                    (`Known.rounds_until_affordable`)
    a look          when `Known.paid` may lose what it is likely to: a share of the time is earned
    a plain round   when `Known.needs_plain`: what drafts are compared with must be recent
    copies          after `ProposalBackoff.pause` rounds, none while they are verified
"""
