"""Engines that vkvmap runs in; each is optional and nothing else imports them."""
