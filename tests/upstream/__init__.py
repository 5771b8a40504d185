"""vLLM's own tests, run against our backend.

`python -m upstream` (`make upstream-tests`) fetches vLLM's
source distribution, runs a selection of its tests with our plugin, and holds every outcome against
an expectations file. No file of vLLM is kept in this repository.
"""
