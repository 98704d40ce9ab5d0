"""The troubleshooting page, which the app prints and shows without a network."""
