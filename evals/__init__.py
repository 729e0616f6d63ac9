"""Evaluations of a model behind an OpenAI endpoint, and the gate that compares a candidate with its baseline"""
