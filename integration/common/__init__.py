"""What every framework's adapter needs. Knows no framework.

* ``agreement``: the ranks of a group, what they compare, and what each raises if they differ.
* ``pool``: the exchanges of one worker by geometry and capacity; their start-up and counters.
* ``formats``: in which format the rows of a layer travel; ``input_scales``: static scales that all
  ranks have in common.
* ``draft_head``: the LM head that ranks share, of a model that drafts tokens.
* ``options``: what a user can choose; ``refusals``: what is refused at start-up, and how it is
  said; ``logs``, ``stats``, ``watch``: what a user sees of it.
* ``names``: what an adapter's list of its framework's names is made of.

An adapter describes the experts of a layer (`formats.ExpertsInput`) and how its users write our
options (`options.Wording`). Everything here takes it from there.
"""
