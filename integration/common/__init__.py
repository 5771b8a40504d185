"""What more than one framework's adapter needs. Nothing here knows a framework.

* ``agreement``: the ranks of a group, what they compare, and what each raises if they differ.
* ``pool``: the exchanges of one worker by geometry, the bound of a step; start-up and counters.
* ``formats``: the format in which the rows of a layer travel.
* ``options``: what a user can choose; ``refusals``: what is refused at start-up, and how it is
  said; ``stats``, ``watch``, ``slow_rank``: what a user sees of it.
* ``names``: the names of its framework that an adapter touches; ``own_source`` reads most of them.

An adapter says what the experts of a layer take (`formats.ExpertsInput`), and how its users write
our options (`options.Wording`). The modules here do the rest.
"""
