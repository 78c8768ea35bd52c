"""Trainings beside each other: the same model and data under several strategies, each in processes of its own."""
