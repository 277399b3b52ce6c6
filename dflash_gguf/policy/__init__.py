"""How much a round drafts and verifies. Arithmetic only: no clock, no file, no model.

    rule.py     the two choices of a round: what is asked for, and what is verified of it
    prices.py   what candidates must bring to be worth the rows they take
    known.py    what choices rest on: the rate, what promises were worth, what may still be lost

Read in this order. `Fixed` in rule.py shows what a rule is; `Auto` below it is the one that users
get. ../rounds.py asks and tells a rule; what passes take is told by ../costs, which need not be
read for it. Words, and what they are counted in:

    plain           of a round in which every sequence runs one row and gets one token
    paid, free      of proposers: whether candidates cost a pass (a drafter's) or none (copies)
    ranked, brief   of drafts: several candidates a position, or the best alone, which is quicker
    way             positions and shape of a paid draft
    mixed           of rounds in which both kinds propose
    rate            tokens a second of the best way to decode: how many a second of time must bring
    worth           tokens that a pass must bring for its candidates: rate * the seconds they add
    value           tokens that a pass is expected to bring beyond its worth
    gain, loss      what a way brings beyond plain decoding, or takes: tokens, or plain rounds
    look            a draft that is not expected to gain, made to see what comes of it
    quiet           of plain rounds in which nobody is asked, or nothing is proposed: the rule hears
                    of them later, all at once

When something is asked again:

    the best way    after `Known.n_kept` rounds, so that deciding is a small part of the time;
                    where it may not be run, when the account allows it (`Known.n_until`)
    a look          when `Known.paid` may lose what it is likely to: a share of the time is earned
    a plain round   when `Known.needs_plain`: what drafts are compared with must be recent
    copies          after `Asking.pause` rounds, none while they are verified
"""
