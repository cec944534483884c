"""The GPT that onecurve trains. No file here knows a collective."""

from onecurve.model.gpt import GPT, token_loss

__all__ = ["GPT", "token_loss"]
