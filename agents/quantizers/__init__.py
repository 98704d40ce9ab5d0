"""Make exports of a finished run: the merged model, and quantized models with their proof."""
