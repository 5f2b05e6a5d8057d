"""The transaction: plan, apply, verify, reverse. Knows no architecture, no vendor, no screen."""
