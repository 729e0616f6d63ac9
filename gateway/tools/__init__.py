"""Tool calls and reasoning sections: what a model is held to, and how they are separated from its text"""
