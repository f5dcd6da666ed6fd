"""fedsim sweep: a recipe's runs side by side, each an ordinary run folder, and the page that they make."""
