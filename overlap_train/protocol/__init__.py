"""Slots, signals and epochs: how ranks hand each other chunks (docs/design.md, The protocol)."""
