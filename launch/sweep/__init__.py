"""fedsim sweep: a recipe's runs in parallel, each in an ordinary run folder, and a page of their results."""
