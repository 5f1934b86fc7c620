"""Stages that are killed or hurt under streams: what do users notice?"""
