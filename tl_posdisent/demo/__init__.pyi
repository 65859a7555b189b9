from .demo_model import demo_hf_model as demo_hf_model
from .demo_model import demo_text as demo_text
from .demo_model import demo_tokenizer as demo_tokenizer
from .demo_model import demo_tokens as demo_tokens
from .demo_model import load_demo_model as load_demo_model
