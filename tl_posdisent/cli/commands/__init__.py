"""Commands by subject: their own options, their help, and what they show."""
