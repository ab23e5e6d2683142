"""langchain-tests' suite for chat models, with `ChatOpenAI` as an application's author would point it at the server."""

import os

from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests


class TestNanoserve(ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, object]:
        return {
            "base_url": os.environ["SERVER"] + "/v1",
            "api_key": "none",
            "model": os.environ["MODEL"],
            "temperature": 0,
            # Without it, a model of this size says the same for ever in some of the forms it is held to.
            "frequency_penalty": 0.3,
            "max_tokens": 256,
            "max_retries": 0,
            "stream_usage": True,
            # The tests want one call where the API says one or more, and a small model repeats itself.
            "model_kwargs": {"parallel_tool_calls": False},
        }

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str:
        return os.environ["MODEL"]

    @property
    def enable_vcr_tests(self) -> bool:
        return False
