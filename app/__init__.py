"""The master: window, command line and the services behind them."""
