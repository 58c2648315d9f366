"""How models write calls of tools. Each reader takes an answer apart, to its end."""
