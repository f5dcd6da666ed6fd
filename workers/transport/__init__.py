"""How envelopes travel: endpoints, listeners, connections, and what the kernel says of them."""
