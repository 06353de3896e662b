//! As ../../c/consumer.c, in Rust: `consumer MODEL.gguf MMPROJ.gguf`.
mod pylloyal;

use pylloyal::{dry_run, live_objects, number_after, sampling, store_params, Branch, Model, Projector, Prompt, Result, Store};

const SIDE: usize = 48;
const N_STEPS: usize = 8;

fn print(name: &str, said: &(Vec<i32>, bool)) {
    let mut line = name.to_string();
    for token in &said.0 {
        line += &format!(" {token}");
    }
    if said.1 {
        line += " end";
    }
    println!("{line}");
}

fn fork_a_prompt(model: &Model, store: &Store) -> Result<()> {
    let root = store.root(&sampling(4.0))?;
    root.prefill(&model.tokenize("<|im_start|>user\nWhat colour is the shape?<|im_end|>\n<|im_start|>assistant\n")?)?;
    let forks = root.fork(Some(&[1, 2, 3]))?;
    let greedy = root.fork(None)?;
    greedy[0].set_sampling(&sampling(0.0))?;
    print("greedy", &store.tick(&greedy, N_STEPS)?[0]);
    for (i, said) in store.tick(&forks, N_STEPS)?.iter().enumerate() {
        print(&format!("sampled {}", i + 1), said);
    }
    Ok(())
}

fn question_a_picture(model: &Model, projector: &Projector, store: &Store, root: &Branch) -> Result<()> {
    let mut rgb = vec![245; SIDE * SIDE * 3]; // a blue square at the top right, on white
    for y in 2..14 {
        for x in 34..46 {
            rgb[(y * SIDE + x) * 3..][..3].copy_from_slice(&[50, 80, 220]);
        }
    }
    let prompt = Prompt::make(model, projector, "<|im_start|>user\n", &rgb, SIDE as u32)?;
    let quote = prompt.quote()?;
    println!("picture {} cells {} positions", quote.n_cells, quote.n_pos);
    root.prefill_prompt(&prompt)?;
    let forks: Vec<_> = [root.fork(None)?, root.fork(None)?].into_iter().flatten().collect();
    forks[0].prefill(&model.tokenize("What colour is the shape?<|im_end|>\n<|im_start|>assistant\n")?)?;
    forks[1].prefill(&model.tokenize("Where is the shape?<|im_end|>\n<|im_start|>assistant\n")?)?;
    for (name, said) in ["colour", "where"].iter().zip(store.tick(&forks, N_STEPS)?) {
        print(&format!("{name} '{}'", model.detokenize(&said.0)?), &said);
    }
    Ok(())
}

fn refuse_a_plan(path: &str) -> Result<()> {
    let allowed = 64 << 20;
    let need = number_after(&dry_run(path, &store_params(1 << 20))?, "\"context_bytes\":").expect("context_bytes");
    println!("plan {}: {need} bytes of cells, {allowed} allowed", if need > allowed { "refused" } else { "taken" });
    Ok(())
}

fn refuse_a_decode(store: &Store) -> Result<()> {
    let root = store.root(&sampling(0.0))?;
    let before = store.pressure()?;
    match root.prefill(&[0; 600]) {
        Err(e) if e.code == pylloyal::E_CONTEXT => {
            println!("decode refused: code {} state {} need {} have {}", e.code, e.state, e.need, e.have);
            let after = store.pressure()?;
            assert!(after.cells_used == before.cells_used && i64::from(after.cells_remaining) == e.have);
        }
        other => panic!("600 tokens were not refused: {other:?}"),
    }
    Ok(())
}

fn run(model_path: &str, mmproj_path: &str) -> Result<()> {
    pylloyal::check_layout()?;
    let mut params = store_params(512);
    (params.n_branches, params.n_threads) = (8, 1);
    let model = Model::open(model_path)?;
    let projector = Projector::open(&model, mmproj_path)?;
    let store = Store::open(&model, &params)?;
    fork_a_prompt(&model, &store)?;
    let root = store.root(&sampling(0.0))?;
    question_a_picture(&model, &projector, &store, &root)?;
    refuse_a_plan(model_path)?;
    refuse_a_decode(&store)
}

fn main() {
    let words: Vec<String> = std::env::args().collect();
    let [_, model, mmproj] = words.as_slice() else {
        eprintln!("consumer MODEL.gguf MMPROJ.gguf");
        std::process::exit(2);
    };
    if let Err(e) = run(model, mmproj) {
        eprintln!("{e}");
        std::process::exit(1);
    }
    let left = live_objects().unwrap_or(u32::MAX);
    println!("left behind: {left}");
    std::process::exit(i32::from(left != 0));
}
