"""What every framework's adapter needs. Knows no framework.

* ``agreement``: the ranks of a group, what they compare, and what each raises if they differ.
* ``pool``: the exchanges of one worker by geometry and capacity; their start-up and counters.
* ``formats``: in which format the rows of a layer travel; ``input_scales``: static scales that all
  ranks have in common.
* ``draft_head``: the LM head that ranks share, of a model that drafts tokens.
* ``options``: what a user can choose; ``logs``, ``stats``, ``watch``: what a user sees of it.

An adapter describes the experts of a layer (`formats.ExpertsInput`) and how its users write our
options (`options.Wording`). Everything here takes it from there.
"""
