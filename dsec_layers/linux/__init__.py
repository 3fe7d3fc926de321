"""Thin shims over Linux calls that Python has no module for. No policy here."""
