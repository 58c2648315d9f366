"""The routes that need only the tokenizer: /tokenize, /detokenize, /tokenizer_info, and
/v1/messages/count_tokens.
"""

from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from services.common.errors import InvalidArgument, StepwellError
from services.gateway.adapters.http.anthropic.bodies import CountTokensBody
from services.gateway.adapters.http.anthropic.request import render as render_messages
from services.gateway.adapters.http.exchange.errors import MESSAGES
from services.gateway.adapters.http.exchange.json_pieces import JsonReply, LongList
from services.gateway.adapters.http.exchange.parse import BodyReader
from services.gateway.adapters.http.openai.bodies import DetokenizeBody, TokenizeBody
from services.gateway.adapters.http.openai.chat import render
from services.gateway.core.fleet.membership import Membership
from services.gateway.core.gate import Gate
from services.gateway.core.request.inference import Inference

COUNT_TOKENS = f"{MESSAGES}/count_tokens"


@dataclass(eq=False)
class TokenizerRoutes:
    """The handlers of the routes. Requests are answered without a replica."""

    inference: Inference
    membership: Membership
    gate: Gate
    bodies: BodyReader

    async def tokenize(self, request: Request) -> Response:
        """Converts text or a conversation to token ids."""
        with self.gate.enter():
            body = await self.bodies.read(request, TokenizeBody)
            self.inference.check_model(body.model, request.state.caller)
            return await self._tokenize(body)

    async def _tokenize(self, body: TokenizeBody) -> Response:
        if (body.prompt is None) == (body.messages is None):
            raise InvalidArgument("give either prompt or messages", field="prompt")
        is_text = body.prompt is not None
        for name in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs"):
            if is_text and getattr(body, name) is not None:
                raise InvalidArgument(f"{name} may only be given with messages", field=name)
        text = body.prompt if body.prompt is not None else await render(body, self.inference)
        special = is_text if body.add_special_tokens is None else body.add_special_tokens
        token_name = self.inference.tokenizer.token_name
        token_ids = await self.inference.texts.tokenize(text, add_special_tokens=special)
        names = (token_name(token) for token in token_ids) if body.return_token_strs else None
        return JsonReply(
            {
                "count": len(token_ids),
                "max_model_len": self.membership.max_model_len(),
                "tokens": LongList(token_ids),
                "token_strs": None if names is None else LongList(names),
            }
        )

    async def detokenize(self, request: Request) -> Response:
        """Converts token ids to text."""
        with self.gate.enter():
            body = await self.bodies.read(request, DetokenizeBody)
            self.inference.check_model(body.model, request.state.caller)
            text = await self.inference.texts.detokenize(body.tokens)
        return JSONResponse({"prompt": text})

    async def tokenizer_info(self, _request: Request) -> Response:
        """Shows the tokenizer's configuration and chat template."""
        return JSONResponse(self.inference.tokenizer.description())

    async def count_tokens(self, request: Request) -> Response:
        """Counts the tokens of a conversation in Anthropic's schema."""
        with self.gate.enter():
            body = await self.bodies.read(request, CountTokensBody)
            self.inference.check_model(body.model, request.state.caller)
            try:
                text = await render_messages(body, self.inference)
                token_ids = await self.inference.texts.tokenize(text, add_special_tokens=False)
            except StepwellError as error:
                raise body.in_client_words(error) from error
        return JSONResponse({"input_tokens": len(token_ids)})
