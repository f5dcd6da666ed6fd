"""How letters travel: endpoints, doors, connections, and what the kernel says of them."""
