// Chat rendering and parsing by llama.cpp's own template code, with its silent fallbacks closed: it would put ChatML in the
// place of a missing template, ignore a tool template that does not parse, lose the words of one that raises, and drop
// messages a template cannot take. Each of these is an error here.
#include <algorithm>
#include <set>

#include "chat.h"
#include "engine/llama/deep_stack.hpp"
#include "engine/llama/llama_parts.hpp"

namespace pyl {

using json = common_json;

struct ChatTemplates {
    common_chat_templates_ptr templates;
    std::map<std::string, bool> caps;
    bool add_special = false;
};

namespace {

[[noreturn]] void bad_request(const std::string & what) { throw Error(PYL_E_FORMAT, "chat request: " + what); }

// The reader recurses once for every open bracket.
void check_depth(std::string_view text) {
    size_t depth = 0;
    for (size_t i = 0; i < text.size(); i++) {
        const char c = text[i];
        if (c == '"') {
            for (i++; i < text.size() && text[i] != '"'; i++) i += text[i] == '\\';
        } else if (c == '[' || c == '{') {
            if (++depth > 512) bad_request("nested more than 512 deep");
        } else if (c == ']' || c == '}') {
            depth -= depth > 0;
        }
    }
}

// What the template parser and interpreter recurse over: brackets, blocks, and the length of one expression.
void check_template_depth(std::string_view source, const std::string & which) {
    constexpr size_t max_bytes = 1u << 20, max_expression = 64u << 10, max_depth = 100;
    const auto refuse = [&](const std::string & what) { throw Error(PYL_E_TEMPLATE, which + " does not parse: " + what); };
    if (source.size() > max_bytes) refuse("more than " + std::to_string(max_bytes) + " bytes");
    size_t blocks = 0;
    for (size_t i = 0; i + 1 < source.size(); i++) {
        if (source[i] != '{' || (source[i + 1] != '{' && source[i + 1] != '%' && source[i + 1] != '#')) continue;
        const char kind = source[i + 1] == '{' ? '}' : source[i + 1];
        const size_t start = i += 2;
        size_t depth = 0;
        for (; i + 1 < source.size() && !(source[i] == kind && source[i + 1] == '}' && depth == 0); i++) {
            if (kind == '#') continue;
            const char c = source[i];
            if (c == '"' || c == '\'') {
                for (i++; i < source.size() && source[i] != c; i++) i += source[i] == '\\';
            } else if (c == '(' || c == '[' || c == '{') {
                if (++depth > max_depth) refuse("brackets nested more than " + std::to_string(max_depth) + " deep");
            } else if (c == ')' || c == ']' || c == '}') {
                depth -= depth > 0;
            }
        }
        if (kind == '#') continue;
        if (i - start > max_expression) refuse("an expression of more than " + std::to_string(max_expression) + " bytes");
        if (kind != '%') continue;
        const std::string_view tag = source.substr(start, i - start);
        const size_t word = tag.find_first_not_of(" \t\r\n-+");
        if (word == std::string_view::npos) continue;
        const std::string_view rest = tag.substr(word);
        const auto is = [&](const char * name) { return rest.starts_with(name); };
        if (is("end")) {
            blocks -= blocks > 0;
        } else if ((is("if") || is("for") || is("macro") || is("call") || is("filter") || is("generation") || (is("set") && rest.find('=') == std::string_view::npos)) && ++blocks > max_depth) {
            refuse("blocks nested more than " + std::to_string(max_depth) + " deep");
        }
    }
}

json parse_json(std::string_view text) {
    check_depth(text);
    try {
        return json::parse(std::string(text));
    } catch (const std::exception & error) {
        bad_request(std::string("not JSON: ") + error.what());
    }
}

std::string_view trim(std::string_view text) {
    constexpr std::string_view space = " \t\r\n\f\v";
    const size_t first = text.find_first_not_of(space);
    return first == std::string_view::npos ? std::string_view() : text.substr(first, text.find_last_not_of(space) - first + 1);
}

bool is_json(const std::string & text) {
    try {
        json::parse(text);
        return true;
    } catch (const std::exception &) {
        return false;
    }
}

void check_keys(const json & object, const std::set<std::string> & known, const std::string & where) {
    if (!object.is_object()) bad_request(where + " is not an object");
    for (const auto & [key, value] : object.items()) {
        if (!known.contains(key)) bad_request(where + " has the unknown key '" + key + "'");
    }
}

bool get_bool(const json & object, const char * key, bool otherwise) {
    if (!object.contains(key) || object.at(key).is_null()) return otherwise;
    if (!object.at(key).is_boolean()) bad_request(std::string(key) + " is not true or false");
    return object.at(key).get<bool>();
}

std::string get_string(const json & object, const char * key, const char * otherwise) {
    if (!object.contains(key) || object.at(key).is_null()) return otherwise;
    if (!object.at(key).is_string()) bad_request(std::string(key) + " is not a string");
    return object.at(key).get<std::string>();
}

// One template by its own words: the engine's constructor reports a parse error only as "std::exception".
void check_parses(const std::string & source, const std::string & which) {
    check_template_depth(source, which);
    try {
        const common_chat_template parsed(source, "", "");
    } catch (const std::exception & error) {
        throw Error(PYL_E_TEMPLATE, which + " does not parse: " + error.what());
    }
}

std::shared_ptr<ChatTemplates> load(const LlamaModel & model, const std::string & source) {
    if (source.empty()) {
        const char * own = llama_model_chat_template(model.raw(), nullptr);
        if (!own || !*own) throw Error(PYL_E_TEMPLATE, "the model file carries no chat template; give one as `template`");
        check_parses(own, "the model's chat template");
        if (const char * tools = llama_model_chat_template(model.raw(), "tool_use"); tools && *tools) check_parses(tools, "the model's tool template");
    } else {
        if (source.find("{%") == std::string::npos && source.find("{{") == std::string::npos) throw Error(PYL_E_TEMPLATE, "`template` is the source of a template, not its name: '" + source.substr(0, 80) + "'");
        check_parses(source, "the given chat template");
    }
    auto out = std::make_shared<ChatTemplates>();
    out->templates = common_chat_templates_init(model.raw(), source);
    out->caps = common_chat_templates_get_caps(out->templates.get());
    out->add_special = model.info().add_bos || model.info().add_eos;
    return out;
}

struct Request {
    common_chat_templates_inputs inputs;
    std::string source;
    std::string reasoning_format;
    bool has_system = false, has_later_system = false, has_tool_calls = false;
    json notes = json::array();
};

// The engine reads the keys it knows and drops the others without a word.
void check_message(const json & message, const std::string & where) {
    check_keys(message, {"role", "content", "tool_calls", "reasoning_content", "name", "tool_call_id"}, where);
    if (message.contains("content") && message.at("content").is_array()) {
        for (size_t i = 0; i < message.at("content").size(); i++) check_keys(message.at("content").at(i), {"type", "text"}, where + ".content[" + std::to_string(i) + "]");
    }
    if (message.contains("tool_calls") && message.at("tool_calls").is_array()) {
        for (size_t i = 0; i < message.at("tool_calls").size(); i++) {
            const std::string place = where + ".tool_calls[" + std::to_string(i) + "]";
            check_keys(message.at("tool_calls").at(i), {"id", "type", "function"}, place);
            if (message.at("tool_calls").at(i).contains("function")) check_keys(message.at("tool_calls").at(i).at("function"), {"name", "arguments"}, place + ".function");
        }
    }
}

void check_tools(const json & tools) {
    if (!tools.is_array()) return;  // the engine's own words are good enough
    for (size_t i = 0; i < tools.size(); i++) {
        const std::string place = "tools[" + std::to_string(i) + "]";
        check_keys(tools.at(i), {"type", "function"}, place);
        if (tools.at(i).contains("function")) check_keys(tools.at(i).at("function"), {"name", "description", "parameters"}, place + ".function");
    }
}

Request read_request(std::string_view text) {
    json body = parse_json(text);
    check_keys(body, {"messages", "tools", "tool_choice", "parallel_tool_calls", "add_generation_prompt", "continue_final_message", "enable_thinking", "reasoning_format", "grammar", "template", "template_kwargs", "parser"},
               "the request");
    if (!body.contains("messages") || !body.at("messages").is_array() || body.at("messages").empty()) bad_request("messages must be a list with at least one message");
    Request out;
    json messages = json::array();
    for (size_t i = 0; i < body.at("messages").size(); i++) {
        json message = body.at("messages").at(i);
        check_message(message, "messages[" + std::to_string(i) + "]");
        if (!message.contains("content") || message.at("content").is_null()) message["content"] = "";
        const std::string role = get_string(message, "role", "");
        const bool is_system = role == "system" || role == "developer";
        out.has_system |= is_system, out.has_later_system |= is_system && i > 0;
        out.has_tool_calls |= role == "tool" || (message.contains("tool_calls") && !message.at("tool_calls").empty());
        messages.push_back(message);
    }
    try {
        out.inputs.messages = common_chat_msgs_parse_oaicompat(messages);
        if (body.contains("tools")) {
            check_tools(body.at("tools"));
            out.inputs.tools = common_chat_tools_parse_oaicompat(body.at("tools"));
        }
        out.inputs.tool_choice = common_chat_tool_choice_parse_oaicompat(get_string(body, "tool_choice", "auto"));
        out.reasoning_format = get_string(body, "reasoning_format", "none");
        out.inputs.reasoning_format = common_reasoning_format_from_name(out.reasoning_format);
    } catch (const Error &) {
        throw;
    } catch (const std::exception & error) {
        bad_request(error.what());
    }
    out.inputs.parallel_tool_calls = get_bool(body, "parallel_tool_calls", false);
    out.inputs.add_generation_prompt = get_bool(body, "add_generation_prompt", true);
    out.inputs.continue_final_message = get_bool(body, "continue_final_message", false) ? COMMON_CHAT_CONTINUATION_AUTO : COMMON_CHAT_CONTINUATION_NONE;
    out.inputs.enable_thinking = get_bool(body, "enable_thinking", true);
    out.inputs.grammar = get_string(body, "grammar", "");
    out.source = get_string(body, "template", "");
    if (body.contains("template") && body.at("template").is_string() && out.source.empty()) throw Error(PYL_E_TEMPLATE, "`template` is empty");
    if (body.contains("template_kwargs") && !body.at("template_kwargs").is_null()) {
        if (!body.at("template_kwargs").is_object()) bad_request("template_kwargs is not an object");
        for (const auto & [key, value] : body.at("template_kwargs").items()) {
            if (key == "messages" || key == "tools" || key == "add_generation_prompt" || key == "enable_thinking") bad_request("template_kwargs sets '" + key + "', which has an option of its own");
            out.inputs.chat_template_kwargs[key] = value.dump();
        }
    }
    // The engine sets it only to true; a template that takes its absence for a yes would open a turn nobody asked for.
    out.inputs.chat_template_kwargs["add_generation_prompt"] = "false";
    if (out.inputs.continue_final_message != COMMON_CHAT_CONTINUATION_NONE) {
        const auto & last = out.inputs.messages.back();
        if (last.role != "assistant" || !last.tool_calls.empty()) bad_request("continue_final_message: the last message is not an assistant's, or it has tool calls");
        if (get_bool(body, "add_generation_prompt", false)) bad_request("continue_final_message and add_generation_prompt contradict each other");
    }
    const std::string parser = get_string(body, "parser", "auto");
    if (parser != "auto" && parser != "content") bad_request("parser is '" + parser + "'; it is auto or content");
    out.inputs.force_pure_content = parser == "content";
    return out;
}

// What a template cannot take is refused here, where the engine would only log and go on without it.
void check_caps(const ChatTemplates & chat, Request & request) {
    const auto can = [&](const char * what) { return chat.caps.contains(what) && chat.caps.at(what); };
    if (!request.inputs.tools.empty() && request.inputs.tool_choice != COMMON_CHAT_TOOL_CHOICE_NONE && !can("supports_tools")) throw Error(PYL_E_TEMPLATE, "the chat template does not take tools");
    if (request.has_tool_calls && !can("supports_tool_calls")) throw Error(PYL_E_TEMPLATE, "the chat template does not take tool calls or tool results");
    if (request.has_system && !can("supports_system_role")) {
        if (request.has_later_system) throw Error(PYL_E_TEMPLATE, "the chat template takes no system message, and one that is not the first cannot be put in front of another");
        if (request.inputs.messages.size() == 1) throw Error(PYL_E_TEMPLATE, "the chat template takes no system message, and there is no other message to put its text into");
        request.notes.push_back(json("the chat template takes no system message: its text was put in front of the next message"));
    }
}

common_chat_params apply(const ChatTemplates & chat, Request & request) {
    try {
        return common_chat_templates_apply(chat.templates.get(), request.inputs);
    } catch (const std::exception & error) {
        // Was it the template that raised, or the engine that found no way to parse what the model will write?
        if (!request.inputs.force_pure_content) {
            Request plain = request;
            plain.inputs.force_pure_content = true;
            bool renders = true;
            std::string words;
            try {
                common_chat_templates_apply(chat.templates.get(), plain.inputs);
            } catch (const std::exception & own) {
                renders = false;
                words = own.what();
            }
            if (!renders) throw Error(PYL_E_TEMPLATE, "the chat template raised: " + words);
            throw Error(PYL_E_TEMPLATE, std::string("the chat template renders, but no parser could be made for its output (parser: \"content\" does without one): ") + error.what());
        }
        throw Error(PYL_E_TEMPLATE, std::string("the chat template raised: ") + error.what());
    }
}

// The engine rearranges messages for some templates, and loses words on the way: a template's own to drop, never its.
void check_words(const ChatTemplates & chat, const Request & request, const std::string & prompt) {
    for (size_t i = 0; i < request.inputs.messages.size(); i++) {
        const auto & message = request.inputs.messages[i];
        const std::string_view words = trim(message.content);
        if (message.role != "assistant" || words.empty() || prompt.find(words) != std::string::npos) continue;
        Request plain = request;
        plain.inputs.force_pure_content = true;  // the messages as they are
        try {
            if (apply(chat, plain).prompt.find(words) == std::string::npos) continue;
        } catch (const Error &) {
            continue;  // it takes them in the engine's form alone
        }
        throw Error(PYL_E_TEMPLATE, "the content of messages[" + std::to_string(i) + "] would be lost beside its " + (message.reasoning_content.empty() ? "tool calls" : "reasoning_content") + ", in the form the engine gives it for this chat template");
    }
}

const char * name_of(common_grammar_trigger_type type) {
    switch (type) {
        case COMMON_GRAMMAR_TRIGGER_TYPE_TOKEN: return "token";
        case COMMON_GRAMMAR_TRIGGER_TYPE_WORD: return "word";
        case COMMON_GRAMMAR_TRIGGER_TYPE_PATTERN: return "pattern";
        case COMMON_GRAMMAR_TRIGGER_TYPE_PATTERN_FULL: return "pattern_full";
    }
    return "";
}

GrammarTriggers triggers_of(const json & list) {
    if (!list.is_array() || list.empty()) bad_request("a lazy grammar needs triggers");
    GrammarTriggers triggers;
    for (const json & one : list) {
        const std::string type = get_string(one, "type", ""), value = get_string(one, "value", "");
        if (type == "word") {
            triggers.patterns.push_back(regex_escape(value));
        } else if (type == "pattern") {
            triggers.patterns.push_back(value);
        } else if (type == "pattern_full") {
            triggers.patterns.push_back((value.starts_with('^') ? "" : "^") + value + (value.ends_with('$') ? "" : "$"));
        } else if (type == "token" && one.contains("token") && one.at("token").is_number_integer()) {
            triggers.tokens.push_back(one.at("token").get<int>());
        } else {
            bad_request("a trigger's type is '" + type + "'; it is word, pattern, pattern_full or token");
        }
    }
    return triggers;
}

}  // namespace

GrammarTriggers read_triggers(std::string_view list) { return triggers_of(parse_json(list)); }

std::unique_ptr<Grammar> LlamaModel::chat_grammar(std::string_view rendered) const {
    const json body = parse_json(rendered);
    if (!body.is_object()) bad_request("not an object");
    const std::string gbnf = get_string(body, "grammar", "");
    if (gbnf.empty()) return nullptr;
    if (get_bool(body, "grammar_lazy", false)) {
        const GrammarTriggers triggers = triggers_of(body.value("triggers", json::array()));
        return grammars().make(gbnf, "root", &triggers);
    }
    auto grammar = grammars().make(gbnf, "root");
    const std::string prefill = get_string(body, "grammar_prefill", "");
    for (const Token token : tokenize(prefill, PYL_TOKENIZE_PARSE_SPECIAL)) {
        if (!grammar->allows(token)) throw Error(PYL_E_GRAMMAR, "line 1, column 1: the grammar does not take what the prompt ends with: '" + prefill + "'");
        grammar->accept(token);
    }
    return grammar;
}

std::string LlamaModel::chat_render(std::string_view text) const {
    std::string out;
    on_deep_stack([&] { out = chat_render_here(text); });
    return out;
}

std::string LlamaModel::chat_render_here(std::string_view text) const {
    Request request = read_request(text);
    const std::scoped_lock lock(chat_mutex_);
    auto & chat = chat_[request.source];
    if (!chat) {
        try {
            chat = load(*this, request.source);
        } catch (...) {
            chat_.erase(request.source);
            throw;
        }
    }
    check_caps(*chat, request);
    const common_chat_params params = apply(*chat, request);
    check_words(*chat, request, params.prompt);
    json triggers = json::array();
    for (const auto & t : params.grammar_triggers) {
        json one = json::object();
        // Functionary's matches before what its grammar takes, which would then fail on a token that has landed.
        one["type"] = name_of(t.type), one["value"] = t.value == ">>>(?!all)" ? ">>>((?!all)[\\s\\S])" : t.value, one["token"] = t.token;
        triggers.push_back(one);
    }
    json thinking = json::object();
    thinking["supported"] = params.supports_thinking, thinking["start"] = params.thinking_start_tag, thinking["ends"] = params.thinking_end_tags;
    json parser = json::object();
    parser["format"] = static_cast<int>(params.format), parser["reasoning_format"] = request.reasoning_format;
    parser["generation_prompt"] = params.generation_prompt, parser["rules"] = params.parser;
    json out = json::object();
    out["prompt"] = params.prompt, out["generation_prompt"] = params.generation_prompt, out["add_special"] = chat->add_special;
    // Grammars made from the template begin with the end of the prompt; a caller's own begins with the answer.
    out["grammar_prefill"] = request.inputs.grammar.empty() && !params.grammar.empty() && !params.grammar_lazy ? params.generation_prompt : std::string();
    out["grammar"] = params.grammar, out["grammar_lazy"] = params.grammar_lazy, out["triggers"] = triggers;
    out["stops"] = params.additional_stops, out["preserved_tokens"] = params.preserved_tokens;
    out["thinking"] = thinking, out["parser"] = parser, out["notes"] = request.notes;
    return out.dump();
}

static std::string parse_here(std::string_view text);

std::string llama_chat_parse(std::string_view text) {
    std::string out;
    on_deep_stack([&] { out = parse_here(text); });
    return out;
}

static std::string parse_here(std::string_view text) {
    const json body = parse_json(text);
    check_keys(body, {"text", "partial", "parser"}, "the request");
    if (!body.contains("text") || !body.contains("parser")) bad_request("text and parser are needed");
    const json & given = body.at("parser");
    check_keys(given, {"format", "reasoning_format", "generation_prompt", "rules"}, "parser");
    common_chat_parser_params params;
    if (!given.contains("format") || !given.at("format").is_number_integer()) bad_request("parser.format is not a number");
    const int format = given.at("format").get<int>();
    if (format < 0 || format >= COMMON_CHAT_FORMAT_COUNT) bad_request("parser.format is unknown");
    params.format = static_cast<common_chat_format>(format);
    params.generation_prompt = get_string(given, "generation_prompt", "");
    try {
        params.reasoning_format = common_reasoning_format_from_name(get_string(given, "reasoning_format", "none"));
        if (const std::string rules = get_string(given, "rules", ""); !rules.empty()) params.parser.load(rules);
        const bool is_partial = get_bool(body, "partial", false);
        const common_chat_msg message = common_chat_parse(get_string(body, "text", ""), is_partial, params);
        json calls = json::array();
        for (const auto & call : message.tool_calls) {
            // The engine takes a text that breaks off for a finished one.
            if (!is_partial && !is_json(call.arguments)) throw Error(PYL_E_FORMAT, "the text breaks off in a call of " + call.name + ": its arguments are " + call.arguments);
            json function = json::object(), one = json::object();
            function["name"] = call.name, function["arguments"] = call.arguments;
            one["id"] = call.id, one["type"] = "function", one["function"] = function;
            calls.push_back(one);
        }
        json out = json::object();
        out["role"] = "assistant", out["content"] = message.content, out["reasoning_content"] = message.reasoning_content, out["tool_calls"] = calls;
        return out.dump();
    } catch (const Error &) {
        throw;
    } catch (const std::exception & error) {
        throw Error(PYL_E_FORMAT, error.what());
    }
}

}  // namespace pyl
