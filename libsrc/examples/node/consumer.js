'use strict';
// As ../c/consumer.c, in JavaScript: node consumer.js LIBRARY MODEL.gguf MMPROJ.gguf
const { load, E_CONTEXT } = require('./pylloyal.js');

const N_STEPS = 8;
const SIDE = 48;

function line(name, said) {
    console.log([name, ...said.tokens, ...(said.ended ? ['end'] : [])].join(' '));
}

function forkAPrompt(pyl, model, store) {
    const root = pyl.root(store, pyl.sampling(4));
    pyl.prefill(store, root, pyl.tokenize(model, '<|im_start|>user\nWhat colour is the shape?<|im_end|>\n<|im_start|>assistant\n'));
    const forks = pyl.fork(store, root, BigUint64Array.of(1n, 2n, 3n)), greedy = pyl.fork(store, root);
    pyl.setSampling(store, greedy[0], pyl.sampling(0));
    line('greedy', pyl.tick(store, greedy, N_STEPS)[0]);
    pyl.tick(store, forks, N_STEPS).forEach((said, i) => line(`sampled ${i + 1}`, said));
    pyl.prune(store, root);
}

function questionAPicture(pyl, model, projector, store) {
    const rgb = new Uint8Array(SIDE * SIDE * 3).fill(245); // a blue square at the top right, on white
    for (let y = 2; y < 14; y++) {
        for (let x = 34; x < 46; x++) rgb.set([50, 80, 220], (y * SIDE + x) * 3);
    }
    const prompt = pyl.picturePrompt(model, projector, '<|im_start|>user\n', rgb, SIDE);
    try {
        const quote = pyl.quote(prompt);
        console.log(`picture ${quote.n_cells} cells ${quote.n_pos} positions`);
        const root = pyl.root(store, pyl.sampling(0));
        pyl.decodePrompt(store, root, prompt);
        const forks = [pyl.fork(store, root)[0], pyl.fork(store, root)[0]];
        ['What colour is the shape?', 'Where is the shape?'].forEach((words, i) => pyl.prefill(store, forks[i], pyl.tokenize(model, `${words}<|im_end|>\n<|im_start|>assistant\n`)));
        pyl.tick(store, forks, N_STEPS).forEach((said, i) => line(`${['colour', 'where'][i]} '${pyl.detokenize(model, said.tokens)}'`, said));
        forks.forEach((fork) => pyl.prune(store, fork)); // the picture's cells stay: the root has them
    } finally {
        pyl.freePrompt(prompt);
    }
}

function refuseAPlan(pyl, path) {
    const allowed = 64 * 2 ** 20, need = pyl.dryRun(path, pyl.storeParams(2 ** 20)).context_bytes;
    console.log(`plan ${need > allowed ? 'refused' : 'taken'}: ${need} bytes of cells, ${allowed} allowed`);
}

function refuseADecode(pyl, store) {
    const root = pyl.root(store, pyl.sampling(0)), before = pyl.pressure(store);
    try {
        pyl.prefill(store, root, new Int32Array(600));
    } catch (e) {
        if (e.code !== E_CONTEXT) throw e;
        console.log(`decode refused: code ${e.code} state ${e.state} need ${e.need} have ${e.have}`);
        const after = pyl.pressure(store);
        if (after.cells_used !== before.cells_used || after.cells_remaining !== e.have) throw new Error('a refused call has changed something');
        return;
    }
    throw new Error('600 tokens were not refused');
}

function run(library, modelPath, mmprojPath) {
    const pyl = load(library);
    const undo = [];
    const keep = (handle, free) => (undo.push(() => free(handle)), handle);
    try {
        const model = keep(pyl.openModel(modelPath), pyl.freeModel);
        const projector = keep(pyl.openProjector(model, mmprojPath), pyl.freeProjector);
        const store = keep(pyl.openStore(model, Object.assign(pyl.storeParams(512), { n_branches: 8, n_threads: 1 })), pyl.freeStore);
        forkAPrompt(pyl, model, store);
        questionAPicture(pyl, model, projector, store);
        refuseAPlan(pyl, modelPath);
        refuseADecode(pyl, store);
    } finally {
        undo.reverse().forEach((free) => free());
    }
    const left = pyl.liveObjects();
    console.log(`left behind: ${left}`);
    return left ? 1 : 0;
}

if (process.argv.length !== 5) {
    console.error('node consumer.js LIBRARY MODEL.gguf MMPROJ.gguf');
    process.exitCode = 2;
} else {
    try {
        process.exitCode = run(...process.argv.slice(2));
    } catch (e) {
        console.error('code' in e ? `code ${e.code}, state ${e.state}, need ${e.need}, have ${e.have}: ${e.message}` : e.message);
        process.exitCode = 1;
    }
}
