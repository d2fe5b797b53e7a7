//! A server that reaches its PostgreSQL by TLS.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use posthaste_backend_tests::servers::Postgres;

use crate::process::Installation;
use crate::subscriber::Subscriber;

/// Writes a file that only PostgreSQL may read. The server of the tests runs as another user if the tests run as root.
fn write_private(path: &Path, text: &str) {
    std::fs::write(path, text).expect("a file");
    std::fs::set_permissions(path, Permissions::from_mode(0o600)).expect("its mode");
    let is_root = Command::new("id").arg("-u").output().is_ok_and(|id| id.stdout == b"0\n");
    if is_root {
        assert!(Command::new("chown").arg("postgres").arg(path).status().expect("chown").success());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_verifies_the_certificate_of_its_database() {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::set_permissions(folder.path(), Permissions::from_mode(0o755)).expect("its mode");
    let made = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).expect("a certificate");
    let [certificate, key, root] = ["certificate.pem", "key.pem", "root.pem"].map(|name| folder.path().join(name));
    write_private(&certificate, &made.cert.pem());
    write_private(&key, &made.signing_key.serialize_pem());
    std::fs::write(&root, made.cert.pem()).expect("a file");
    let (shown, key) = (certificate.display(), key.display());
    let database = Postgres::start_with(&format!("-c ssl=on -c ssl_cert_file={shown} -c ssl_key_file={key}")).await;

    let mut installation = Installation::new(&[]);
    installation.use_postgres(format!("{}?sslmode=verify-full&sslrootcert={}", database.url(), root.display()));
    let server = installation.start().await;
    let subscriber = Subscriber::start().await;
    server.api.subscribe("order.placed", "billing", &subscriber.endpoint()).await;
    let id = server.api.publish("order.placed", "1").await;
    assert_eq!(subscriber.wait_for(1).await[0].event_id, id);
    let ask = "SELECT count(*) > 0 AND bool_and(ssl) FROM pg_stat_ssl JOIN pg_stat_activity USING (pid)
        WHERE application_name = 'posthaste'";
    assert_eq!(installation.execute(ask), "t\n");
    assert!(server.terminate().await.success(), "{}", installation.log());

    let unknown = format!("{}?sslmode=verify-full", database.url());
    let mut check = Command::new(env!("CARGO_BIN_EXE_posthaste"));
    check.args(["check", "--listen", "127.0.0.1:0"]).current_dir(folder.path());
    check.env("POSTHASTE__DATABASE__URL", unknown).env("POSTHASTE__SECRETS__KEY_FILE", "posthaste.key");
    let refused = check.output().expect("posthaste check");
    let found = format!("{refused:?}");
    assert!(!refused.status.success() && found.contains("UnknownIssuer"), "{found}");
}
