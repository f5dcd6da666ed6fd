"""Local solvers as pure functions: first-order, IVON, VON, IASG sampling; and server optimisers."""
