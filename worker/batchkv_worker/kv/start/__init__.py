"""Decides how a model is served: measures and checks once, before any job."""
