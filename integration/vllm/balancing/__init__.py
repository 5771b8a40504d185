"""Expert load balancing (``--enable-eplb``)."""
