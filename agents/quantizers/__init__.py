"""Make other files of a finished run: the merged model, and quantized ones with their proof."""
